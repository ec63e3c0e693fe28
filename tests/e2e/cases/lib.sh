# Common to all cases: the project's commands must be on PATH (. .venv/bin/activate), and the repository's root the current folder.
# Each works in a folder of its own, removed at the end.
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v ingest >/dev/null || { echo "put the project's commands on PATH first"; exit 2; }
W=$(mktemp -d)
trap 'rm -rf "$W"' EXIT
ok() { echo "OK: $*"; echo OK; exit 0; }
fail() { echo "FAIL: $*"; echo FAIL; exit 1; }
