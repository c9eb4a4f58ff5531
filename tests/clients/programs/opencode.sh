# https://opencode.ai/docs/providers/#custom-provider
set -e
url=$2 model=$3
export HOME=$PWD/home
mkdir -p home work
cd work
cat > opencode.json << JSON
{"provider": {"mbd": {"npm": "@ai-sdk/openai-compatible", "name": "mbd", "options": {"baseURL": "$url"},
 "models": {"$model": {"name": "$model", "limit": {"context": 131072, "output": 64}}}}},
 "model": "mbd/$model", "autoupdate": false, "share": "disabled"}
JSON
opencode run --model "mbd/$model" "Say hello." < /dev/null > first.txt
opencode run --model "mbd/$model" --continue "Once more." < /dev/null > second.txt
python3 -c 'import json; print(json.dumps({"text": open("first.txt").read()}))'
