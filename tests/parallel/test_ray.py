"""The deployment for Ray Serve, on a Ray of this machine. Skipped (counted) where Ray is not installed."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray")

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "ray_serve.py"


@pytest.mark.filterwarnings("default")
def test_two_replicas_answer() -> None:
    import ray
    from ray import serve

    app = runpy.run_path(str(SCRIPT))["app"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": 18765})
            serve.run(app({"model": "demo", "replicas": "2", "gpus": "0"}))
            body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
            answers = [httpx.post("http://127.0.0.1:18765/v1/completions", json=body, timeout=60).json() for _ in range(4)]
            assert len({answer["choices"][0]["text"] for answer in answers}) == 1
            assert answers[0]["usage"]["completion_tokens"] == 8
        finally:
            serve.shutdown()
            ray.shutdown()
