"""The command line of lm-evaluation-harness with the model `mbd` in it, for releases that discover no entry points.

Releases up to 0.4.13 know only their own models. Later releases find this package's entry point `lm_eval.models`, and
plain `lm_eval --model mbd` works. The command line, its options and its results are the harness's own.
"""

MODEL = "mbd"
CLASS = "mbd_core.harness.model:HarnessModel"


def register() -> None:
    """Adds the model to the harness's registry by its name. Its modules are imported only when it is used."""
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=CLASS)


def main() -> None:
    """Runs `lm_eval`; exits with code 2, and one sentence, if it is not installed."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise SystemExit(
            "mbd-lm-eval: lm_eval is not installed; install it with: pip install 'mbd-cluster[harness]'"
        ) from None
    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
