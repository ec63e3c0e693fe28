"""Sources in object storage, read through obstore: folders of images, tables, and what tars need to be read there."""
