"""Whether a server answers: ``inkling health``, and with it the health check of a container.

Readiness alone does not say it: server 2.51.0 calls a model ready whose process is dead or stopped (releases from
26.01 on see the dead one). So a request of three tokens goes through all three models: with two left the
engine has one drafted. It overtakes what waits, and it ends at its deadline: an answer cut off by that is the busy
engine's own and as good as a whole one, as is the refusal of a full queue. Dead and stopped processes never answer.
"""

from __future__ import annotations

import http.client
import json

from inkling.parameters import INT32_MAX
from inkling.protocol import ENSEMBLE_MODEL, MODELS

_QUEUE_IS_FULL = "requests are waiting, which is the bound"


def status(url: str, path: str, timeout_s: float) -> int:
    """Of the answer to GET ``path`` at ``url`` (host:port of HTTP); 0 when there is none."""
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def ailment(url: str, timeout_s: float = 10.0) -> str:
    """Why the server at ``url`` (host:port of HTTP) does not serve; empty when it does."""
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        for path in ("/v2/health/ready", *(f"/v2/models/{model}/ready" for model in MODELS)):
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                return f"http://{url}{path} answers {response.status}"
        connection.request("POST", f"/v2/models/{ENSEMBLE_MODEL}/generate", json.dumps(_probe(timeout_s)))
        answer = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"http://{url} does not answer within {timeout_s:g} s: {error!r}"
    finally:
        connection.close()
    error = answer.get("error", "")
    return "" if _QUEUE_IS_FULL in error else error


def _probe(timeout_s: float) -> dict[str, object]:
    return {
        "input_ids": [0],
        "max_tokens": 3,
        "ignore_eos": True,
        "priority": INT32_MAX,
        "timeout_ms": int(1000 * timeout_s / 2),
    }
