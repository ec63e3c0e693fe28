"""Saves a checkpoint on disks that are too small by less and less. Run in a process of its own; argument: an empty folder.

Prints for each size in bytes what the save said.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bucketline.errors import TrainError
from tests.constrained import SmallDisk
from tests.unit.train.outputs.test_checkpoint import parts, save, state


def main() -> int:
    folder = Path(sys.argv[1])
    disk = SmallDisk(folder, 1 << 22)
    print("disk" if disk.is_disk else "limit")
    trained = parts()
    for num_bytes in range(96 << 10, 1 << 20, 96 << 10):
        disk.resize(num_bytes)
        try:
            save(folder, trained, state(1), keep=1)
        except TrainError as error:
            print(num_bytes, error)
        else:
            print(num_bytes, "done")
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
