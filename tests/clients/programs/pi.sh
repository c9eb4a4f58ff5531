# https://github.com/earendil-works/pi: a provider of one's own in models.json
set -e
url=$2 model=$3
export HOME=$PWD/home
mkdir -p home/.pi/agent work
cat > home/.pi/agent/models.json << JSON
{"providers": {"mbd": {"baseUrl": "$url", "api": "openai-completions", "apiKey": "none",
 "models": [{"id": "$model", "contextWindow": 131072, "maxTokens": 64}]}}}
JSON
cd work
ask() { # a nonsensical answer has no end, and pi exits with 1 where its limit cuts it
    pi -p --provider mbd --model "$model" "$@" < /dev/null > out.txt 2> log.txt || grep "Response was truncated" log.txt || { cat log.txt >&2; exit 1; }
}
ask "Say hello."
ask --continue "Once more."
python3 -c 'import json; print(json.dumps({"text": open("out.txt").read() or "cut"}))'
