"""Write the TypeScript contract of the service, which types a frontend's oRPC client.

  scripts/make_contract src/trader.d.ts      (without a file: to standard output)

  import type { TraderClient } from './trader'
  const client: TraderClient = createORPCClient(new RPCLink({ url: `${server}/api/rpc` }))

A running service serves it at GET /api/contract.d.ts.
"""

import argparse
import sys
from pathlib import Path

from trader.api import openapi, typescript
from trader.api.registry import REGISTRY, load_procedures
from trader.settings.settings import Settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="output file; default: standard output")
    options = parser.parse_args()
    load_procedures()
    text = typescript.declarations(openapi.make_document(REGISTRY, Settings.load({}, None, demo=True)))
    if options.file is None:
        sys.stdout.write(text)
        return 0
    try:
        options.file.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"make_contract: {options.file} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
