"""example.py as a newcomer runs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_example_prints_prompt_completion_and_speed():
    command = [sys.executable, "example.py", "--prompt", "What is the capital of France?", "--max-tokens", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Prompt:     What is the capital of France?" in done.stdout
    assert "Completion: The capital of France is Paris." in done.stdout
    assert " tok/s, 1 prompts together" in done.stdout
    assert "attention backend" in done.stderr
