"""Write a store by several processes of one machine: a pool of workers with a part each, and the process that publishes."""
