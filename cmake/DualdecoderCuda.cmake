# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Finds a CUDA compiler as DUALDECODER_CUDA asks; sets dualdecoder_has_cuda.
set(dualdecoder_has_cuda OFF)
if(NOT DUALDECODER_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DUALDECODER_CUDA = ${DUALDECODER_CUDA}: must be AUTO, ON or OFF")
endif()
if(DUALDECODER_CUDA STREQUAL "OFF")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(DUALDECODER_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DUALDECODER_CUDA=ON but no CUDA compiler was found")
  endif()
  return()
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90)
endif()
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake before 3.25.2 does not know nvcc's C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit 12.0 REQUIRED)
set(dualdecoder_has_cuda ON)
