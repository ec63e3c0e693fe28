"""What only a GPU can show: `make gpu`. No test module is here, so that pytest collects nothing."""
