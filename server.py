"""Start the server: ``python server.py [flags]``; ``--help`` lists them."""

import sys

from pageserve.cli import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
