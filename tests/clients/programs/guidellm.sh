# https://github.com/vllm-project/guidellm: a benchmark of three requests
set -e
kind=$1 url=${2%/v1} model=$3 folder=$4
case $kind in
stream) format=/v1/chat/completions more= ;;
chat) format=/v1/chat/completions more=,stream=false ;;
completions) format=/v1/completions more= ;;
responses) format=/v1/responses more= ;;
esac
guidellm run --disable-console-interactive \
    --backend "kind=openai_http,target=$url,model=$model,request_format=$format$more" \
    --profile kind=synchronous --constraint kind=max_requests,count=3 \
    --tokenizer "kind=huggingface_auto,model=$folder" \
    --data kind=synthetic_text,prompt_tokens=32,output_tokens=16 --output kind=json,path=report.json
python -c '
import json
totals = json.load(open("report.json"))["benchmarks"][0]["metrics"]["request_totals"]
print(json.dumps({"text": "a report", "requests": totals}))
assert totals["errored"] == 0, totals
'
