"""Import ai-toolkit's and SimpleTuner's caches whose captions have several lines, a trigger word or an instance prompt.

Run it from the repository's root: python -m tests.e2e.cases.ai_toolkit_captions FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.ingest.importers.known import Known, make_known, read_store
from tests.unit.ingest.importers.writers import ai_toolkit, simpletuner

TWO = "{}\n\nIt sits in the light of the evening."


class Case:
    """One cache of a trainer: its samples with the captions that it embedded, and the caption files next to them."""

    def __init__(self, folder: Path, known: Known, embedded: Callable[[str], str], written: Callable[[str], str]) -> None:
        self.folder, self.plain, self.written = folder, known, written
        self.known = replace(known, samples=tuple(replace(one, caption=embedded(one.caption)) for one in known.samples))

    def imported(self, kind: str, name: str) -> tuple[dict[str, Any], str | None]:
        write = ai_toolkit if kind == "ai-toolkit" else simpletuner
        source, store = write(self.folder / name, self.known), self.folder / f"{name}.store"
        for sample in self.plain.samples:
            file = (source / sample.id).with_suffix(".txt")
            if file.parent.exists():
                file.write_text(self.written(sample.caption) + "\n", encoding="utf-8")
        command = ["ingest", "import", kind, str(source), str(store), "--model", str(self.known.model), "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        out: dict[str, Any] = json.loads(ran.stdout) if ran.stdout.strip().startswith("{") else {}
        rejects = [reject["detail"] for reject in out.get("rejects", [])][:1]
        counts = {name: out.get(name) for name in ("imported", "rejected", "text", "notes")}
        print(f"  rc {ran.returncode}", counts, rejects, ran.stderr.strip()[-300:] if ran.returncode else "")
        stored = {one.id: one.record.captions for one in read_store(store)} if store.exists() else {}
        first = stored.get(self.plain.samples[0].id)
        return out, first[0] if first else None


def said(out: dict[str, Any], word: str) -> bool:
    return any(word in note for note in out.get("notes") or [])


def main(folder: Path) -> int:
    """Return the number of imports whose captions are others than those that were trained, in silence."""
    known = make_known(folder / "known", "sdxl")
    whole = TWO.format(known.samples[0].caption)
    bad = 0

    def check(what: str, *, is_good: bool, stored: str | None) -> None:
        nonlocal bad
        bad += not is_good
        print("ok  " if is_good else "BAD ", what, f"stored {stored!r}")

    # ai-toolkit embeds the whole text of a caption file
    out, stored = Case(folder, known, TWO.format, TWO.format).imported("ai-toolkit", "multi")
    is_good = (stored == whole and out.get("text") == "source") or said(out, "line")
    check("ai-toolkit: the whole caption with its embedding, or a message that says lines", is_good=is_good, stored=stored)

    # `trigger_word: ohwx` of that trainer: '[trigger] red cat' becomes 'ohwx red cat' before it is embedded
    out, stored = Case(folder, known, "ohwx {}".format, "[trigger] {}".format).imported("ai-toolkit", "trigger")
    is_good = (stored or "").startswith("ohwx") or said(out, "trigger")
    check("ai-toolkit: the caption that was trained, or a message that says why not", is_good=is_good, stored=stored)

    # SimpleTuner with disable_multiline_split
    out, stored = Case(folder, known, TWO.format, TWO.format).imported("simpletuner", "lines")
    check("SimpleTuner: captions kept whole", is_good=stored == whole or said(out, "line"), stored=stored)

    # and with an instance prompt before each caption
    out, stored = Case(folder, known, "ohwx {}".format, "{}".format).imported("simpletuner", "prompt")
    is_good = (stored or "").startswith("ohwx") or len(out.get("notes") or []) > 1
    check("SimpleTuner: instance prompt", is_good=is_good, stored=stored)
    return bad


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) > 0)
