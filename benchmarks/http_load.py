"""Latency, throughput and goodput of any OpenAI-compatible server under a stated load.

The same command measures pageserve, vLLM, llama.cpp or SGLang: prompts are token ids where the
server takes them (so their lengths are exact), else text; answers are streamed, greedy, and
counted by the usage in the stream's last chunk.

    open loop     --rate 4                     arrivals do not wait for answers (Poisson)
                  --rate 4 --burstiness 0.25   clustered; inf spaces them evenly
    closed loop   --concurrency 24             so many users, each asks again once answered
    a sweep       --rate 1 2 4 8               one row each, one picture

Latencies of an open loop count from when a request was due, so a stalled server cannot hide
behind the requests it kept from being sent; ``lag`` is how late this client itself was. ITL is
the gap between chunks: a server that puts several tokens into one chunk shows fewer, larger gaps,
while TPOT divides by tokens. Goodput counts requests that met every limit of ``--goodput``.

Prompts follow from --seed: a second run with the same one against the same server finds them in
its prefix cache.

What this does not show: the client shares the machine with the server unless it is run elsewhere;
random prompts say nothing of answer quality, and draw other experts and other prefix hits than
real ones.

    python benchmarks/http_load.py --url http://127.0.0.1:8000 --concurrency 8 --requests 64
    python benchmarks/http_load.py --rate 1 2 4 --goodput ttft:500 tpot:50 --plot /tmp/load
"""

import sys

if __name__ == "__main__":
    from load.cli import main  # not above: the client processes import this file, and need none

    sys.exit(main(__doc__))
