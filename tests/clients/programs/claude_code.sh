# https://code.claude.com/docs: an endpoint of one's own by ANTHROPIC_BASE_URL
set -e
url=$2 model=$3
export HOME=$PWD/home ANTHROPIC_BASE_URL=${url%/v1} ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=$model
export ANTHROPIC_DEFAULT_HAIKU_MODEL=$model CLAUDE_CODE_MAX_OUTPUT_TOKENS=64 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
mkdir -p home work
cd work
claude -p "Say hello." < /dev/null > first.txt
claude -p --continue "Once more." < /dev/null > second.txt
! grep "API Error" first.txt second.txt >&2
python3 -c 'import json; print(json.dumps({"text": open("first.txt").read() or "cut"}))'
