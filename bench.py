"""Throughput of the engine on fixed workloads; see `python bench.py --help` and nanovllm/bench.py."""

from nanovllm.bench import main

if __name__ == "__main__":
    main()
