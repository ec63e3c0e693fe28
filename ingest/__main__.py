"""Entry point of `python -m bucketline.ingest`, and of `torchrun -m bucketline.ingest` for several processes."""

import sys

from bucketline.ingest.cli import main

if __name__ == "__main__":
    sys.exit(main())
