"""What you learn: start the server, wait until it is ready, and stream an answer over HTTP.

python examples/first_run.py ["Where is the capital of China?"]
python examples/first_run.py "What is in the picture?" examples/shapes.png    # needs fd-vision
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = 8180
QUESTION = sys.argv[1] if len(sys.argv) > 1 else "Where is the capital of China?"
PICTURE = Path(sys.argv[2]) if len(sys.argv) > 2 else None
MODEL = "models/ernie-tiny" if PICTURE is None else "models/qwen3-vl-tiny"


def main() -> int:
    """Serve the demo model, ask one question, stop the server."""
    command = [str(Path(sys.executable).parent / "fastdeploy"), "serve", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(PORT)]
    print("$ fastdeploy", *command[1:], flush=True)
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until_ready(server)
        asked: object = QUESTION
        if PICTURE is not None:
            url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
            image = {"type": "image_url", "image_url": {"url": url}}
            asked = [image, {"type": "text", "text": QUESTION}]
        body = {"messages": [{"role": "user", "content": asked}], "stream": True, "temperature": 0}
        shown = json.dumps(body) if PICTURE is None else f'{json.dumps(body)[:150]}..."}}'
        print(f"\n$ curl -N localhost:{PORT}/v1/chat/completions -d '{shown}'", flush=True)
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    text = choices[0]["delta"].get("content") if choices else None
                    print(text or "", end="", flush=True)
        print()
    finally:
        server.terminate()
        server.wait(timeout=30)
    return 0


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    """Poll /health/ready, as a load balancer would."""
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{PORT}/health/ready", timeout=2
            ) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main())
