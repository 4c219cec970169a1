# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Target docs: the pages of README.md, docs/ and the public headers as HTML in <build>/docs/html; a warning is an error.
find_package(Doxygen 1.9.4 REQUIRED)
set(DUALDECODER_DOCS_DIR ${CMAKE_CURRENT_BINARY_DIR}/docs)
file(GLOB pages CONFIGURE_DEPENDS README.md CHANGELOG.md docs/*.md docs/adr/*.md)
list(JOIN pages " " DUALDECODER_DOCS_INPUT)
string(APPEND DUALDECODER_DOCS_INPUT " ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_BINARY_DIR}/include")
configure_file(docs/Doxyfile.in Doxyfile @ONLY)
file(MAKE_DIRECTORY ${DUALDECODER_DOCS_DIR})
add_custom_target(
  docs
  COMMAND Doxygen::doxygen ${CMAKE_CURRENT_BINARY_DIR}/Doxyfile
  COMMENT "Building the documentation"
  VERBATIM
)
