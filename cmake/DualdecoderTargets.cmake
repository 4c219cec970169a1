# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# What every target of ours has in common: warnings, visibility, names, and the compiled components' two faces (a library to install, and an
# object library through which unit tests reach hidden functions in a shared build).
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH dualdecoder_source_root)

# Warnings and sanitizers of a target of ours. Designated initialisers leave members out on purpose.
function(dualdecoder_strict target)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;-Wshadow;-Wno-missing-field-initializers>
                      $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${DUALDECODER_WERROR}>>:-Werror>
                      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers>
                      $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${DUALDECODER_WERROR}>>:--Werror=all-warnings>
  )
  if(DUALDECODER_SANITIZE)
    target_compile_options(
      ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DUALDECODER_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>
    )
    target_link_options(${target} PRIVATE -fsanitize=${DUALDECODER_SANITIZE})
  endif()
  if(DUALDECODER_FUZZ)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
  endif()
endfunction()

# Alias and export name of a component whose target is dualdecoder_<name>.
function(dualdecoder_component name)
  add_library(dualdecoder::${name} ALIAS dualdecoder_${name})
  set_target_properties(dualdecoder_${name} PROPERTIES EXPORT_NAME ${name} VERIFY_INTERFACE_HEADER_SETS ON)
endfunction()

# dualdecoder_compiled_component(<name> SOURCES ... HEADERS ...)
function(dualdecoder_compiled_component name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;HEADERS")
  set(objects dualdecoder_${name}_objects)
  add_library(${objects} OBJECT ${arg_SOURCES})
  target_link_libraries(${objects} PUBLIC dualdecoder_core)
  target_include_directories(${objects} PUBLIC $<BUILD_INTERFACE:${dualdecoder_source_root}>)
  set_target_properties(
    ${objects}
    PROPERTIES CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON
  )
  dualdecoder_strict(${objects})

  add_library(dualdecoder_${name} $<TARGET_OBJECTS:${objects}>)
  target_link_libraries(dualdecoder_${name} PUBLIC dualdecoder_core)
  target_sources(
    dualdecoder_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${dualdecoder_source_root}/include FILES ${arg_HEADERS}
  )
  set_target_properties(
    dualdecoder_${name}
    PROPERTIES LINKER_LANGUAGE CXX
               OUTPUT_NAME dualdecoder-${name}
               VERSION ${PROJECT_VERSION}
               SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
               INSTALL_RPATH "$ORIGIN"
  )
  if(BUILD_SHARED_LIBS AND CMAKE_SYSTEM_NAME STREQUAL "Linux") # also hides what our objects hold of std:: and of header-only libraries
    set(exports ${dualdecoder_source_root}/cmake/exports.map)
    target_link_options(dualdecoder_${name} PRIVATE LINKER:--version-script=${exports})
    set_property(TARGET dualdecoder_${name} PROPERTY LINK_DEPENDS ${exports})
  endif()
  if(DUALDECODER_SANITIZE)
    target_link_options(dualdecoder_${name} PRIVATE -fsanitize=${DUALDECODER_SANITIZE})
  endif()
  dualdecoder_component(${name})
endfunction()

# dualdecoder_private_libraries(<name> LINK ... BUILD_ONLY ...): LINK reaches the link line of whoever uses the static library, BUILD_ONLY
# (header-only libraries) nobody.
function(dualdecoder_private_libraries name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LINK;BUILD_ONLY")
  target_link_libraries(dualdecoder_${name}_objects PUBLIC ${arg_LINK} PRIVATE ${arg_BUILD_ONLY})
  target_link_libraries(dualdecoder_${name} PRIVATE ${arg_LINK})
endfunction()

# dualdecoder_simd_sources(<name> DIRECTORY <dir>): compiles every <dir>/*.simd.inl once for each instruction set, in a namespace of its own;
# the component chooses at run time. Elsewhere than on x86-64 only the baseline is built.
function(dualdecoder_simd_sources name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "DIRECTORY" "")
  set(sets baseline)
  set(flags_baseline "")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(APPEND sets avx2 avx512)
    set(flags_avx2 -mavx2 -mfma -mf16c)
    set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
    target_compile_definitions(dualdecoder_${name}_objects PUBLIC DUALDECODER_SIMD_X86=1)
  endif()
  file(GLOB kernels CONFIGURE_DEPENDS ${arg_DIRECTORY}/*.simd.inl)
  foreach(kernel IN LISTS kernels)
    cmake_path(GET kernel FILENAME kernel_file)
    string(REPLACE ".simd.inl" "" kernel_name ${kernel_file})
    foreach(set IN LISTS sets)
      set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/${arg_DIRECTORY}/${kernel_name}.${set}.cpp)
      file(CONFIGURE OUTPUT ${wrapper} CONTENT
           "#define DUALDECODER_SIMD_NAMESPACE simd_${set}\n#include \"${arg_DIRECTORY}/${kernel_file}\"\n"
      )
      target_sources(dualdecoder_${name}_objects PRIVATE ${wrapper})
      set_property(
        SOURCE ${wrapper} PROPERTY COMPILE_OPTIONS ${flags_${set}} -Wno-psabi $<$<NOT:$<CONFIG:Debug>>:-O3>
      )
    endforeach()
  endforeach()
endfunction()
