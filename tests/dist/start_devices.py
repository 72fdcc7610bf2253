"""What a person starts on each machine: `python start_devices.py SPEC.json NAME` prints events, then the end.

The specification holds the arguments of `launch` as JSON. It needs no torch, so that it starts at once.
"""

import json
import sys
from pathlib import Path

from manyhands.errors import ManyhandsError
from manyhands.ir.cluster import Cluster
from manyhands.ir.codec import decode
from manyhands.runtime.ranks import Event, launch


def tell(device: str, event: Event) -> None:
    print(json.dumps({"device": device} | event), flush=True)


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    names = tuple(sys.argv[2].split(","))
    more = given["more"] | given["more_of"].get(sys.argv[2], {})
    cluster = decode(Cluster, given["cluster"])
    try:
        launch(given["task"], given["job"], cluster.names, tell, here=names, cluster=cluster, **more)
    except ManyhandsError as error:
        print(json.dumps({"event": "end", "error": type(error).__name__, "message": str(error)}), flush=True)
    else:
        print(json.dumps({"event": "end", "error": None}), flush=True)


if __name__ == "__main__":
    main()
