"""Run the trainer without a checkout: `torchrun -m bucketline.train` or `python -m bucketline.train`."""

from bucketline.train.main import main

if __name__ == "__main__":
    main(prog="python -m bucketline.train")
