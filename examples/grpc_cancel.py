"""tritonclient over gRPC: an answer of 2,000 tokens, cancelled after five responses; the server stops computing it.

python examples/grpc_cancel.py [host:port]
"""

import queue
import sys

import numpy as np
import tritonclient.grpc as grpc

url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"
inputs = []
for name, datatype, values in (
    ("text_input", "BYTES", np.array([b"def quicksort(values):"], object)),
    ("max_tokens", "INT32", np.array([2000], np.int32)),
    ("stream", "BOOL", np.array([True])),
    ("ignore_eos", "BOOL", np.array([True])),
):
    inputs.append(grpc.InferInput(name, [1], datatype))
    inputs[-1].set_data_from_numpy(values)

arrived: queue.Queue = queue.Queue()
with grpc.InferenceServerClient(url) as client:
    client.start_stream(lambda result, error: arrived.put((result, error)))
    client.async_stream_infer("spec_ensemble", inputs)
    for _ in range(5):
        result, error = arrived.get(timeout=60)
        if error is not None:
            sys.exit(f"refused: {error}")
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    client.stop_stream(cancel_requests=True)  # without the argument it would wait for the other 1,900 tokens
print("\ncancelled")
