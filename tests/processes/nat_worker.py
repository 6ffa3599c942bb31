"""One region on a machine of its own: `python -m tests.processes.nat_worker COORDINATOR REGION [PORT [ANNOUNCE]]`.

It connects to region 0 or 1 and prints "met", sends it some payloads, a second apart, and prints by which way they are connected.
"""

import json
import sys
import time

import torch

from hf_cocodc.coordinator.client import Client
from hf_cocodc.coordinator.messages import Hello, Terms
from hf_cocodc.errors import CocodcError
from hf_cocodc.link.tcp import TcpLink
from hf_cocodc.net.addresses import own_address
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.wire import Wire
from hf_cocodc.settings import RegionConfig
from tests.secret import secret

SECONDS, NUMEL = 3, 1 << 18
TIMEOUT_S = 60.0
"""A router that passes no resets on leaves a broken path for the kernel to find: 30 to 40 seconds."""


def main(coordinator: str, number: str, port: str = "0", announce: str = "") -> None:
    region = int(number)
    regions = RegionConfig(announce=announce or None)
    host, keys = own_address(coordinator, None), Keys.from_secret(secret())
    client, terms = Client(coordinator, "run", keys, 0.5), Terms(count=2, timeout_s=TIMEOUT_S)
    wire = Wire(
        region,
        2,
        host,
        TIMEOUT_S,
        keys=keys,
        port=int(port),
        announce=(lambda own: regions.addresses(own, lane=0)) if announce else None,
    )
    hello = Hello(
        region=region,
        join=False,
        lanes=(wire.whereabouts,),
        machine="here",
        token=number,
        terms=terms,
        compared={},
    )
    try:
        client.meet(hello, TIMEOUT_S)
        link = TcpLink(client, terms, wire, timeout_s=TIMEOUT_S)
        sys.stdout.write("met\n")
        sys.stdout.flush()
        told = []
        for second in range(SECONDS):
            flat = torch.full((NUMEL,), float(region + second))
            link.broadcast(flat, f"payload {second}", second % 2)
            told.append(flat.unique().tolist())
            time.sleep(1.0)
        sys.stdout.write(json.dumps({"ways": link.wire.ways, "told": told}) + "\n")
        link.close()
    except CocodcError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
