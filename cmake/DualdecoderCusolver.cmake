# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Uses cuSOLVER in the component cuda where DUALDECODER_CUSOLVER asks for it and the CUDA toolkit has it; without it the CUDA backend refuses
# StoreKind::shadow_kv.
set(dualdecoder_has_cusolver OFF)
if(NOT dualdecoder_has_cuda OR NOT DUALDECODER_CUSOLVER OR NOT TARGET CUDA::cusolver)
  return()
endif()
set(dualdecoder_has_cusolver ON)
set_property(SOURCE cuda/key_factors.cpp APPEND PROPERTY COMPILE_DEFINITIONS DUALDECODER_HAS_CUSOLVER=1)
dualdecoder_private_libraries(cuda LINK CUDA::cusolver)
