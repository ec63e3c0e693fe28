"""`python -m bucketline.ingest`, and `torchrun -m bucketline.ingest` for several processes."""

import sys

from bucketline.ingest.cli import main

if __name__ == "__main__":
    sys.exit(main())
