# https://qwenlm.github.io/qwen-code-docs: an endpoint of one's own by OPENAI_BASE_URL
set -e
url=$2 model=$3
export HOME=$PWD/home OPENAI_API_KEY=none OPENAI_BASE_URL=$url OPENAI_MODEL=$model QWEN_CODE_MAX_OUTPUT_TOKENS=64
mkdir -p home work
cd work
qwen --auth-type openai -p "Say hello." < /dev/null > first.txt
qwen --auth-type openai --continue -p "Once more." < /dev/null > second.txt
! grep "API Error" first.txt second.txt >&2
python3 -c 'import json; print(json.dumps({"text": open("first.txt").read() or "cut"}))'
