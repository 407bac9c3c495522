#!/usr/bin/env bash
# One request with curl:  examples/request.sh [URL]     (./launch/demo --serve prints the URL)
set -euo pipefail
case "${1-}" in -h | --help) sed -n '2s/^# //p' "$0" && exit ;; esac
curl -sS --fail-with-body "${1:-http://127.0.0.1:30000}/v1/chat/completions" \
    -H 'Content-Type: application/json' -d '{
        "model": "default",
        "temperature": 0,
        "max_tokens": 96,
        "return_meta_info": true,
        "messages": [{"role": "user", "content":
            "Write a SQL query for the color of cars with price below 16, ordered by price."}]
    }'
