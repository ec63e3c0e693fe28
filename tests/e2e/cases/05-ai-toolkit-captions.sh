#!/bin/bash
# SimpleTuner#2414 #3115, sd-scripts#870 and ai-toolkit's caption.py (whole file is one caption; trigger_word): imported captions
. "$(dirname "$0")/lib.sh"
python -m tests.e2e.cases.ai_toolkit_captions $W 2>&1 | grep -v -i torchao; [ ${PIPESTATUS[0]} = 0 ] || fail "see BAD"
ok "captions as they were trained"
