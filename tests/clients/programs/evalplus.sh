# https://github.com/evalplus/evalplus: two problems in the form of HumanEval+, of its own
set -e
kind=$1 url=$2 model=$3
python -c '
import json
prompt = "def double(x):\n    \"\"\"Twice x.\"\"\"\n"
row = {"prompt": prompt, "entry_point": "double", "canonical_solution": "    return 2 * x\n", "test": "", "contract": "", "base_input": [[1]], "plus_input": [[2]], "atol": 0}
for number in range(164):
    print(json.dumps({"task_id": f"HumanEval/{number}", **row}))
' > problems.jsonl
export HUMANEVAL_OVERRIDE_PATH=problems.jsonl OPENAI_API_KEY=none
case $kind in
chat) set -- --greedy ;;
sampled) set -- --temperature 0.8 --n_samples 2 --bs 2 ;;
esac
evalplus.codegen "$model" humaneval --backend openai --base-url "$url" --root results --id_range "[0,2]" "$@" >&2
python -c '
import glob, json
(path,) = glob.glob("results/humaneval/*[0-9].jsonl")
print(json.dumps({"text": "programs", "programs": len(open(path).readlines())}))
'
