"""tritonclient over HTTP. Its ``infer`` cannot call a model that streams, so the answer comes through ``generate``.

python examples/http_client.py [host:port]
"""

import json
import sys
import urllib.request

import tritonclient.http as http

url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8000"
with http.InferenceServerClient(url) as client:
    print("ready:", client.is_model_ready("spec_ensemble"))
    inputs = client.get_model_metadata("spec_ensemble")["inputs"]
    print("inputs:", ", ".join(f"{tensor['name']} {tensor['datatype']}" for tensor in inputs[:4]), "...")

request = {"text_input": "def quicksort(values):", "max_tokens": 24, "return_num_output_tokens": True}
body = json.dumps(request).encode()
with urllib.request.urlopen(f"http://{url}/v2/models/spec_ensemble/generate", body) as response:
    answer = json.load(response)
print(answer["num_output_tokens"], "tokens:", answer["text_output"])
