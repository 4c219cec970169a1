#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Times by kernel of a step, from a trace that dualdecoder-kernel-trace wrote.

A kernel's own time is the distance from the end of the kernel before it on the compute track to its own end: kernels begin early and wait
there, so that their lengths overlap. Own times add up to the step.
"""
import argparse
import collections
import json


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="Chrome trace")
    parser.add_argument("--graph", type=int, default=1, help="which of the trace's graphs; default: the first")
    options = parser.parse_args()

    with open(options.trace) as file:
        events = json.load(file)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    prefix = f"graph {options.graph}: "
    by_track = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X" and tracks[event["tid"]].startswith(prefix):
            by_track[tracks[event["tid"]][len(prefix) :]].append((event["ts"] + event["dur"], event["ts"], event["name"]))
    layers = max(1, sum("attend_kernel" in name for spans in by_track.values() for _, _, name in spans))
    for track, spans in by_track.items():
        spans.sort()
        own = collections.defaultdict(list)
        before = min(begin for _, begin, _ in spans)
        for end, begin, name in spans:
            own[name].append((end - before if track == "compute" else end - begin, end - begin))
            before = end
        total = sum(time for times in own.values() for time, _ in times)
        print(f"{track}: {len(spans)} kernels, {total:.1f} us, {layers} layers")
        print(f"  {'kernel':60} {'count':>6} {'own us':>8} {'length':>8} {'us a layer':>11}")
        for name, times in sorted(own.items(), key=lambda item: -sum(time for time, _ in item[1])):
            each = sum(time for time, _ in times)
            length = sum(span for _, span in times) / len(times)
            print(f"  {name[:60]:60} {len(times):6} {each / len(times):8.2f} {length:8.2f} {each / layers:11.2f}")


if __name__ == "__main__":
    main()
