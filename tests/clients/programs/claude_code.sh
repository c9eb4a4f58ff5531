# https://code.claude.com/docs: an endpoint of one's own by ANTHROPIC_BASE_URL
set -e
url=$2 model=$3
export HOME=$PWD/home ANTHROPIC_BASE_URL=${url%/v1} ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=$model
export ANTHROPIC_DEFAULT_HAIKU_MODEL=$model CLAUDE_CODE_MAX_OUTPUT_TOKENS=32 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
mkdir -p home work
cd work
# all of its instructions and tools are 54,000 tokens of the tiny model; it ends with 1 where an answer is cut
few=(--system-prompt "Be short." --tools Read)
claude -p "Say hello." "${few[@]}" < /dev/null > first.txt || grep "output token maximum" first.txt
claude -p "Once more." --continue "${few[@]}" < /dev/null > second.txt || grep "output token maximum" second.txt
python3 -c 'import json; print(json.dumps({"text": open("first.txt").read() or "cut"}))'
