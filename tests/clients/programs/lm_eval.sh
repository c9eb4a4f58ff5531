# https://github.com/EleutherAI/lm-evaluation-harness: tasks of three rows of its own
set -e
kind=$1 url=$2 model=$3 folder=$4
for n in 3 5 8; do
    echo "{\"question\": \"Tom has 12 pens. Tom sells $n pens. How many pens does Tom have now?\", \"answer\": \"$((12 - n))\"}"
done > rows.jsonl
cat > ask.yaml << 'YAML'
task: ask
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n\n", "Question:"], max_gen_toks: 64, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
YAML
cat > choose.yaml << 'YAML'
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{[answer, '12']}}"
doc_to_target: 0
metric_list: [{metric: acc}]
YAML
case $kind in
chat) set -- --model local-chat-completions --tasks ask --apply_chat_template --model_args "model=$model,base_url=$url/chat/completions,max_retries=1,num_concurrent=2" ;;
completions) set -- --model local-completions --tasks ask,choose --model_args "model=$model,base_url=$url/completions,tokenizer=$folder,max_retries=1" ;;
remote) set -- --model local-completions --tasks ask,choose --model_args "model=$model,base_url=$url/completions,tokenizer_backend=remote,tokenized_requests=false,max_retries=1" ;;
esac
lm_eval run "$@" --include_path . --output_path results > log.txt 2>&1 || { tail -5 log.txt >&2; exit 1; }
python -c '
import glob, json
(path,) = glob.glob("results/**/*.json", recursive=True)
print(json.dumps({"text": "a report", "results": json.load(open(path))["results"]}))
'
