# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# OpenBLAS with its C interface, as the imported target CBLAS::CBLAS. Installed beside the package's config file, because a program that links
# the static cpu component needs it too. Cache variables: CBLAS_INCLUDE_DIR, CBLAS_LIBRARY.
find_path(CBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas openblas-pthread ${CMAKE_LIBRARY_ARCHITECTURE}/openblas-pthread)
find_library(CBLAS_LIBRARY openblas PATH_SUFFIXES openblas-pthread)
mark_as_advanced(CBLAS_INCLUDE_DIR CBLAS_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  CBLAS
  REQUIRED_VARS CBLAS_LIBRARY CBLAS_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "OpenBLAS is needed (Debian and Ubuntu: libopenblas-dev)"
)

if(CBLAS_FOUND AND NOT TARGET CBLAS::CBLAS)
  add_library(CBLAS::CBLAS UNKNOWN IMPORTED)
  set_target_properties(
    CBLAS::CBLAS PROPERTIES IMPORTED_LOCATION "${CBLAS_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${CBLAS_INCLUDE_DIR}"
  )
endif()
