"""``python -m cufa``: see `cufa.tools.cli`."""

import sys

from cufa.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
