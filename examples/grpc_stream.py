"""tritonclient over gRPC: the answer as it comes, the last response told by its FINAL flag.

python examples/grpc_stream.py [host:port]
"""

import queue
import sys

import numpy as np
import tritonclient.grpc as grpc

url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"


def tensor(name: str, datatype: str, value: object) -> grpc.InferInput:
    values = np.array([value], object if datatype == "BYTES" else {"INT32": np.int32, "BOOL": bool}[datatype])
    result = grpc.InferInput(name, [1], datatype)  # shape [1], never [1, 1]
    result.set_data_from_numpy(values)
    return result


inputs = [
    tensor("text_input", "BYTES", b"def quicksort(values):"),
    tensor("max_tokens", "INT32", 24),
    tensor("stream", "BOOL", True),
    tensor("return_finish_reason", "BOOL", True),
]
arrived: queue.Queue = queue.Queue()
with grpc.InferenceServerClient(url) as client:
    client.start_stream(lambda result, error: arrived.put((result, error)))
    client.async_stream_infer("spec_ensemble", inputs, request_id="example")
    is_final = False
    while not is_final:
        result, error = arrived.get(timeout=60)
        if error is not None:
            sys.exit(f"refused: {error}")
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    print(f"\nfinish reason: {result.as_numpy('finish_reason')[0].decode()}")
