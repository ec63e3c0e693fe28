"""`ingest import`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bucketline.command_line import print_json, torchrun_ranks
from bucketline.errors import UsageError
from bucketline.ingest.importers.config import ImportConfig, expect_inputs


@dataclass(frozen=True, kw_only=True)
class Import(ImportConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = ImportConfig.__doc__

    def run(self) -> int:
        expect_inputs(self)
        if (ranks := torchrun_ranks()["world_size"]) > 1:
            raise UsageError(f"ingest import is one process, and torchrun has started {ranks}; run it without torchrun")
        from bucketline.ingest.importers.run import exit_code, import_cache, print_import
        from bucketline.ingest.parallel.signals import exit_code_of

        try:
            result = import_cache(self)
        except KeyboardInterrupt as stop:
            print("interrupted: what was imported is committed; rerun the command to continue", file=sys.stderr)
            return exit_code_of(stop)
        if self.json:
            print_json(result)
        else:
            print_import(result, self)
        return exit_code(result, self)
