# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# cmake -DSOURCE=<root> -P readme_listing.cmake: README.md shows examples/quickstart/main.cpp as it is compiled.
file(READ ${SOURCE}/examples/quickstart/main.cpp example)
file(READ ${SOURCE}/README.md readme)
set(mark "//! [quickstart]\n")
string(FIND "${example}" "${mark}" begin)
string(FIND "${example}" "${mark}" end REVERSE)
string(LENGTH "${mark}" mark_length)
math(EXPR begin "${begin} + ${mark_length}")
math(EXPR length "${end} - ${begin}")
if(length LESS_EQUAL 0)
  message(FATAL_ERROR "examples/quickstart/main.cpp has no listing between two marks '//! [quickstart]'")
endif()
string(SUBSTRING "${example}" ${begin} ${length} listing)
string(FIND "${readme}" "```cpp\n${listing}```\n" found)
if(found EQUAL -1)
  message(FATAL_ERROR "README.md does not show the listing of examples/quickstart/main.cpp; copy it into the block of C++ there")
endif()
