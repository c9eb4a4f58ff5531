"""An option that would be ignored beside other options is refused in one sentence that names both."""

from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from jobs.__main__ import main as mbd
from research.__main__ import main as research

TRAIN = "benchmarks train --model tiny"
LONG = "where --attacks has no prompts or longer-stops or scores"
REMEDY = "; leave it out"
NO_SWEEPS = "has no meaning with evaluate_every=0, which makes no sweeps of held-out problems; leave one of them out"
REPORT_ONLY = "with --report-only"
URL = "--url http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"{TRAIN} --data d --layouts 2:0", "--layouts has no meaning with --data; leave it out"),
        (f"{TRAIN} --data d --length 64", "--length has no meaning with --data; leave it out"),
        (
            f"{TRAIN} --data d --device cpu",
            "--device has no meaning with --data, which measures nothing; leave it out",
        ),
        (
            f"{TRAIN} --count --repeats 9",
            "--repeats has no meaning with --count, which measures nothing; leave it out",
        ),
        (f"{TRAIN} --count --batch 9", "--batch has no meaning without --data; leave it out"),
        (f"{TRAIN} --data d --count", "--count and --data make different tables; leave one of them out"),
        ("benchmarks buffer --bandwidth 9", "--bandwidth has no meaning without --predict; leave it out"),
        ("benchmarks buffer --prefix 9", "--prefix has no meaning without --predict; leave it out"),
        (
            "benchmarks modes --model m --updates 9",
            "--updates has no meaning with --model, which is not trained here; leave it out",
        ),
        (
            "benchmarks context --parts gap --steps 9",
            "--steps has no meaning where --parts has no host; leave it out",
        ),
        (
            "benchmarks context --parts host --length 64",
            "--length has no meaning where --parts has no storing or decoding; leave it out",
        ),
        (
            "benchmarks context --parts host,counted --model sdar-8b",
            "--model has no meaning where --parts has no storing or decoding or gap; leave it out",
        ),
        ("benchmarks sweep --limit 4 --seconds 9", "--seconds has no meaning with --limit; leave it out"),
        ("benchmarks capacity --chip cpu --node-us 1", "chip=cpu is measured as it is: leave out node_us"),
        ("benchmarks arrivals --turn-tokens 9", "turn_tokens=9 has no meaning with turns=1; leave it out"),
        ("benchmarks agreement --think 9", "think=9.0 has no meaning with turns=1; leave it out"),
        ("benchmarks arrivals --long-prompt 9", "long_prompt=9 has no meaning with long_every=0; leave it out"),
        (f"benchmarks bystander {URL} --attacks stops --characters 9", f"--characters has no meaning {LONG}{REMEDY}"),
        (
            f"benchmarks bystander {URL} --attacks headers --one-client",
            "--one-client has no meaning with --attacks headers, which no client sends; leave it out",
        ),
        ("research ledger ordering --out o --report-only --seeds 1", f"--seeds has no meaning {REPORT_ONLY}{REMEDY}"),
        (
            "research ledger ordering --out o --traced 9",
            "--traced has no meaning in ordering, where nothing is traced; leave it out",
        ),
        (
            "research ledger thresholds --out o --workers 1",
            "--workers has no meaning in thresholds, where nothing is trained; leave it out",
        ),
        (
            "research compare --report-only o --limit 9",
            "--limit has no meaning with --report-only, which asks nothing; leave it out",
        ),
        ("research compare --overwrite", "--overwrite has no meaning without --out; leave it out"),
        ("research calls --sweep s --overwrite", "--overwrite has no meaning without --out; leave it out"),
        (
            "research calls --report-only s --out o",
            "--out has no meaning with --report-only, which judges nothing; leave it out",
        ),
        *(
            (f"research {study} --out o --report-only --threads 9", f"--threads has no meaning {REPORT_ONLY}{REMEDY}")
            for study in ("rl", "teacher", "long", "signal")
        ),
        ("research rl --out o --report-only --seeds 9", f"--seeds has no meaning {REPORT_ONLY}{REMEDY}"),
        ("research long --out o --report-only --arms tenth-A", f"--arms has no meaning {REPORT_ONLY}{REMEDY}"),
        (
            "research verified valid --out o --rounds 9",
            "--rounds has no meaning in valid: lengths alone has rounds; leave it out",
        ),
        (
            "research verified turns --out o --models tiny-bd",
            "--models has no meaning in turns, which takes all models; leave it out",
        ),
        (
            "research verified report --out o --problems 9",
            "--problems has no meaning in report, which decodes nothing; leave it out",
        ),
        (
            "research blocks --model m --task gsm-mini --out o --watch 0 --sketch 9",
            "--sketch has no meaning with --watch 0: no cache is projected; leave it out",
        ),
        ("mbd trace a.parquet --out o --max-tokens 9", "--max-tokens has no meaning without --model; leave it out"),
        ("mbd trace a.parquet --out o --decoding {}", "--decoding has no meaning without --model; leave it out"),
        (
            "mbd prepare a.jsonl --model tiny-mbd --show 1 --workers 2",
            "--workers has no meaning without --out: nothing is written; leave it out",
        ),
        (
            "mbd prepare a.jsonl --model tiny-mbd --show 1 --against b",
            "--against has no meaning without --out and --drop-overlap: nothing is reported; leave it out",
        ),
        (
            "mbd grade --task gsm8k --data d --samples s --out o --seed 1",
            "--seed has no meaning with --task gsm8k, which is not generated; leave it out",
        ),
        ("mbd train --schema --plan", "--plan has no meaning with --schema; leave it out"),
        (
            "mbd train --set held_out.validate_every=5",
            "--set held_out.validate_every=5 has no meaning without --validation, which names the data",
        ),
        (
            "mbd train --set held_out.keep_best=validation_accuracy",
            "--set held_out.keep_best=validation_accuracy needs --validation, which names the data",
        ),
        (
            "mbd train --set sweeping.sweep_task=gsm-mini:8",
            "--set sweeping.sweep_task=gsm-mini:8 has no meaning without sweeps: leave it out, or say how often with "
            "--set sweeping.sweep_every=N",
        ),
        (
            "mbd train --set train.schedule=cosine --set train.decay=0.3",
            "train.decay=0.3 has no effect with train.schedule='cosine'; leave it out, or let schedule be trapezoid",
        ),
        (
            "mbd rl --local --set train.lr_min=1e-9",
            "train.lr_min=1e-09 has no effect with train.schedule='constant'; leave it out, or let schedule be cosine "
            "or linear",
        ),
        *(
            (f"mbd rl --local --evaluate-every 0 {option}", f"{value} {NO_SWEEPS}")
            for option, value in (
                ("--held-out-data d", "held_out_data=d"),
                ("--held-out 5", "held_out=5"),
                ("--thresholds 0.5", "thresholds=(0.5,)"),
                ("--no-keep-best", "keep_best=False"),
            )
        ),
        (
            "mbd rl --local --held-out 1000000000",
            "limit=1000000000 of task 'ledger-mini': at most 1000000 problems are generated",
        ),
        *(
            (f"{command} --url-weights stream", f"--url-weights stream has no meaning with {model}, at no URL{REMEDY}")
            for command, model in (
                ("mbd serve --model tiny-mbd", "tiny-mbd"),
                ("mbd sweep --models tiny-mbd,tiny-bd --tasks gsm-mini --out o", "tiny-mbd, tiny-bd"),
            )
        ),
        ("mbd rl --ramp 9", "ramp=9 has no meaning without first_tokens: the limit does not grow"),
        (
            "mbd sweep --endpoint e=http://127.0.0.1:1/v1 --tasks gsm-mini --out o --dtype int8",
            "--dtype has no meaning without --models; leave it out",
        ),
        (
            "mbd sweep --endpoint e=http://127.0.0.1:1/v1 --tasks gsm-mini --out o --actors 2",
            "--actors has no meaning without --models; leave it out",
        ),
        (
            "mbd sweep --models tiny-mbd --tasks gsm-mini --out o --form turn",
            "--form has no meaning without a task harness:NAME; leave it out",
        ),
        (
            "mbd sweep --models tiny-mbd --tasks gsm8k --out o --split valid",
            "--split has no meaning without a generated task; leave it out",
        ),
        (
            "mbd sweep --models tiny-mbd --tasks gsm-mini --out o --top-p 0.5",
            "--top-p has no meaning at --temperature 0, where nothing is drawn; leave it out",
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    called, *argv = line.split()
    assert {"benchmarks": benchmarks, "research": research, "mbd": mbd}[called](argv) == 2
    said = capsys.readouterr()
    assert said.err.rpartition(": " + sentence)[1:] == (": " + sentence, "\n") and said.err.count("\n") == 1
    assert not said.out and not any(tmp_path.iterdir())
