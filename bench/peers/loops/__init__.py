"""The same training loop over several loaders, what happens in it, and the page that shows both."""
