# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Finds LAPACK for the component cpu where DUALDECODER_LAPACK asks for it: the reference implementation, OpenBLAS, or whatever else BLA_VENDOR
# names (see FindLAPACK).
set(dualdecoder_has_lapack OFF)
if(NOT DUALDECODER_LAPACK)
  return()
endif()
set(BLA_SIZEOF_INTEGER 4) # our calls pass int
find_package(LAPACK)
if(NOT LAPACK_FOUND)
  message(FATAL_ERROR "LAPACK was not found: install it (Debian and Ubuntu: liblapack-dev), or set DUALDECODER_LAPACK=OFF for a build without "
                      "StoreKind::shadow_kv"
  )
endif()
set(dualdecoder_has_lapack ON)
set_property(SOURCE src/low_rank.cpp APPEND PROPERTY COMPILE_DEFINITIONS DUALDECODER_HAS_LAPACK=1)
dualdecoder_private_libraries(cpu LINK LAPACK::LAPACK)
