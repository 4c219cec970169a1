#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""The five longest kernels of a layer, from the CSV that scripts/gpu-profile.sh has ncu write.

A kernel's last two launches count, those of steps. ncu runs kernels one by one with a cold cache, so times are a little longer than in a step.
"""
import argparse
import collections
import csv
import re

DURATION = "gpu__time_duration.sum"
SHARES = {
    "DRAM %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "SM %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
STALL = re.compile(r"issue_stalled_(.*)_per_issue_active")


def number(text):
    return float(text.replace(",", "") or 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="output of ncu --csv --page raw; other lines are skipped")
    parser.add_argument("--count", type=int, default=5, help="kernels in the table")
    options = parser.parse_args()

    with open(options.csv, newline="") as file:
        header, units, *rows = csv.reader(line for line in file if line.startswith('"'))
    unit = units[header.index(DURATION)]
    to_us = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "nsecond": 1e-3, "usecond": 1.0}[unit]
    launches = collections.defaultdict(list)
    for row in rows:
        launches[row[header.index("Kernel Name")]].append(row)

    table = []
    for name, all_rows in launches.items():
        last = all_rows[-2:]
        mean = lambda metric: sum(number(row[header.index(metric)]) for row in last) / len(last)
        stalls = sorted(((mean(column), STALL.search(column)[1]) for column in header if STALL.search(column)), reverse=True)
        name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|unnamed>::|dualdecoder::cuda::|^void |\(int\)", "", name)
        table.append((mean(DURATION) * to_us, name.split("(")[0], [mean(metric) for metric in SHARES.values()], stalls[0]))
    print(f"{'us':>8} {' '.join(f'{title:>11}' for title in SHARES)}  {'longest stall, warps an issue':32} kernel")
    for duration, name, shares, (cycles, stall) in sorted(table, reverse=True)[: options.count]:
        print(f"{duration:8.1f} {' '.join(f'{share:11.1f}' for share in shares)}  {f'{stall} {cycles:.2f}':32} {name}")


if __name__ == "__main__":
    main()
