#!/usr/bin/env bash
# One answer, the same as a stream of server-sent events, and the server's counters. URL=host:port sh examples/curl.sh
set -euo pipefail
URL=${URL:-localhost:8000}
METRICS_URL=${METRICS_URL:-localhost:8002}

echo "--- one answer"
curl -fsS "$URL/v2/models/spec_ensemble/generate" \
  -d '{"text_input": "def quicksort(values):", "max_tokens": 24}'
echo
echo "--- streamed: one line of data for each step or more"
curl -fsSN "$URL/v2/models/spec_ensemble/generate_stream" \
  -d '{"text_input": "def quicksort(values):", "max_tokens": 24, "stream": true, "return_finish_reason": true}'
echo "--- vLLM's names for settings"
curl -fsS "$URL/v2/models/spec_ensemble/generate" \
  -d '{"text_input": "def quicksort(values):", "sampling_parameters": "{\"max_tokens\": 8, \"temperature\": 0.8, \"seed\": 7}"}'
echo
echo "--- counters"
curl -fsS "$METRICS_URL/metrics" | grep '^nv_inference_request_success.*spec_ensemble'
