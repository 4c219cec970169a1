# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Finds a CUDA compiler as DUALDECODER_CUDA asks. Sets dualdecoder_has_cuda and, where that is ON, dualdecoder_cudart, the one CUDA runtime
# of this build, and dualdecoder_cuda_language().
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
  set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90a-real 90-virtual) # the kernels use mma.sync and cp.async, so nothing older runs them
endif()
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake before 3.25.2 does not know nvcc's C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit 12.0 REQUIRED)
set(dualdecoder_has_cuda ON)

# Two runtimes in one process would each have their own idea of contexts and streams: what links the runtime by name (dualdecoder_cudart) and
# what CMake adds by itself (CUDA_RUNTIME_LIBRARY) must be the same one.
if(DEFINED CMAKE_CUDA_RUNTIME_LIBRARY)
  set(dualdecoder_cuda_runtime ${CMAKE_CUDA_RUNTIME_LIBRARY})
elseif(BUILD_SHARED_LIBS)
  set(dualdecoder_cuda_runtime Shared)
else()
  set(dualdecoder_cuda_runtime Static)
endif()
if(dualdecoder_cuda_runtime STREQUAL "Static")
  set(dualdecoder_cudart CUDA::cudart_static)
elseif(dualdecoder_cuda_runtime STREQUAL "Shared")
  set(dualdecoder_cudart CUDA::cudart)
else()
  message(FATAL_ERROR "CMAKE_CUDA_RUNTIME_LIBRARY = ${dualdecoder_cuda_runtime}: must be Static or Shared")
endif()

# Language, runtime and code generation of a target of ours that holds CUDA sources.
function(dualdecoder_cuda_language target)
  set_target_properties(
    ${target}
    PROPERTIES CUDA_STANDARD 20
               CUDA_STANDARD_REQUIRED ON
               CUDA_EXTENSIONS OFF
               CUDA_VISIBILITY_PRESET hidden
               CUDA_SEPARABLE_COMPILATION OFF
               CUDA_RUNTIME_LIBRARY ${dualdecoder_cuda_runtime}
  )
  # nvcc 13 hides kernels and gives their templates' stubs internal linkage by itself; older ones are asked to, so that two libraries which
  # instantiate one kernel never launch each other's
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8 AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(
      ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--device-entity-has-hidden-visibility=true;-static-global-template-stub=true>
    )
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-lineinfo>)
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a") # warpgroup products exist on this very architecture
    target_compile_definitions(${target} PRIVATE DUALDECODER_CUDA_SM90A=1)
  endif()
endfunction()
