"""`ingest import`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from bucketline.command_line import (
    print_json,
    torchrun_ranks,
)
from bucketline.errors import SourceError
from bucketline.ingest.importers.config import ImportConfig


@dataclass(frozen=True, kw_only=True)
class Import(ImportConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = ImportConfig.__doc__

    def run(self) -> int:
        from bucketline.ingest.importers.registry import expect_inputs

        expect_inputs(self)
        from bucketline.ingest.importers.run import import_cache
        from bucketline.ingest.importers.summary import print_failures, print_import
        from bucketline.ingest.parallel.signals import exit_code_of

        ranks = torchrun_ranks()
        try:
            result = import_cache(self, **ranks)
        except SourceError as error:
            if self.json and not ranks.get("rank"):
                print_json({"error": error.args[0], "notes": [line.removeprefix("note: ") for line in error.args[1:]]})
            raise
        except KeyboardInterrupt as stop:
            print("interrupted: what was imported is committed; rerun the command to continue", file=sys.stderr)
            return exit_code_of(stop)
        if result is None:
            return 0
        if self.json:
            print_json(asdict(result))
        else:
            print_import(result, self)
        print_failures(result, self)
        return 0 if result.imported + result.unchanged and not result.too_many_rejects else 1
