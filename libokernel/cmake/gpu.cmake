# gpu.cmake: the GPU libraries, all from src/gpu/*.hip:
#   okernel_hip      one AMD code object a target, embedded; host half by the ordinary compiler; no runtime linked
#   okernel_cuda     nvcc over the same files; CUDA's runtime linked statically
#   okernel_standin  the same files on the CPU, through a stand-in for HIP's header, at both wave sizes: for tests
set(OKERNEL_GFX_ALL gfx1030 gfx1100 gfx1101 gfx1102 gfx1151 gfx1200 gfx1201 gfx90a gfx942)
set(OKERNEL_GFX "all" CACHE STRING "AMD targets of the hip library: all, or a list such as gfx1030;gfx1100")
set(OKERNEL_STANDIN "32:gfx1100;64:gfx90a" CACHE STRING
    "Stand-in libraries, one a wave size: <wave size>:<the target whose matrix unit is modelled>")
set(OKERNEL_CUDA_ARCH "90" CACHE STRING "NVIDIA architectures, oldest first, 80 at least; PTX is made of the last")

set(gpu_folder "${CMAKE_CURRENT_SOURCE_DIR}/src/gpu")
file(GLOB gpu_kernels CONFIGURE_DEPENDS src/gpu/*.hip)
file(GLOB gpu_headers CONFIGURE_DEPENDS src/*.h src/gpu/*.h include/*.h)
file(GLOB gpu_common CONFIGURE_DEPENDS src/*.cpp)
list(APPEND gpu_common "${gpu_folder}/device.cpp" "${gpu_folder}/queue.cpp")
set(gpu_include_flags "-I${CMAKE_CURRENT_SOURCE_DIR}/include" "-I${CMAKE_CURRENT_SOURCE_DIR}/src" "-I${gpu_folder}")
# What the operations' numbers rest on: IEEE division and square root, no contraction of what is written apart.
set(gpu_kernel_flags -std=c++17 -O3)

# gpu_library(<target> <backend> <device compiler> <sources>...)
function(gpu_library target backend compiler)
    okernel_library(${target} ${gpu_common} ${ARGN})
    target_include_directories(${target} PRIVATE "${gpu_folder}")
    target_compile_definitions(${target} PRIVATE OKERNEL_BACKEND="${backend}" OKERNEL_DEVICE_COMPILER="${compiler}")
    target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
endfunction()

if("hip" IN_LIST OKERNEL_BACKENDS)
    find_program(OKERNEL_CLANG NAMES clang-19 amdclang clang-20 clang-18 clang REQUIRED DOC "clang with AMD's targets"
                 HINTS "$ENV{ROCM_PATH}/llvm/bin" /opt/rocm/llvm/bin)
    find_path(OKERNEL_DEVICE_LIBS ocml.bc REQUIRED DOC "AMD's device libraries"
              HINTS "$ENV{ROCM_PATH}/amdgcn/bitcode" /opt/rocm/amdgcn/bitcode /usr/lib/x86_64-linux-gnu/amdgcn/bitcode)
    find_path(OKERNEL_HIP_INCLUDE hip/hip_runtime.h REQUIRED DOC "HIP's headers"
              HINTS "$ENV{ROCM_PATH}/include" /opt/rocm/include /usr/include)
    execute_process(COMMAND "${OKERNEL_CLANG}" --version OUTPUT_VARIABLE clang_version)
    string(REGEX MATCH "clang version [0-9.]+" clang_version "${clang_version}")
    execute_process(COMMAND "${OKERNEL_CLANG}" --target=amdgcn-amd-amdhsa -nogpulib --print-supported-cpus
                    OUTPUT_QUIET ERROR_VARIABLE known_targets)

    set(wanted ${OKERNEL_GFX})
    if(OKERNEL_GFX STREQUAL "all")
        set(wanted ${OKERNEL_GFX_ALL})
    endif()
    set(targets "")
    set(left_out "")
    foreach(gfx IN LISTS wanted)
        if(known_targets MATCHES "[ \t\n]${gfx}[ \t\n]")
            list(APPEND targets ${gfx})
        else()
            list(APPEND left_out ${gfx})
        endif()
    endforeach()
    list(JOIN targets " " target_names)
    list(JOIN left_out " " left_out_names)
    if(NOT targets)
        message(FATAL_ERROR "okernel_hip: ${clang_version} knows none of ${OKERNEL_GFX}")
    endif()
    message(STATUS "okernel_hip: ${clang_version}, targets ${target_names}")
    if(left_out)
        message(WARNING "okernel_hip: left out ${left_out_names}: ${clang_version} does not know them")
    endif()

    # Device libraries older than a target lack one file for it, which holds one constant.
    set(device_libs "${CMAKE_CURRENT_BINARY_DIR}/device_libs")
    execute_process(COMMAND "${CMAKE_CURRENT_SOURCE_DIR}/cmake/device_libs.sh" "${OKERNEL_DEVICE_LIBS}"
                            "${OKERNEL_CLANG}" "${device_libs}" ${targets} COMMAND_ERROR_IS_FATAL ANY)

    # All kernels are one translation unit a target; what it makes is embedded as it is.
    set(all_kernels "")
    foreach(kernel IN LISTS gpu_kernels)
        string(APPEND all_kernels "#include \"${kernel}\"\n")
    endforeach()
    file(CONFIGURE OUTPUT kernels.hip CONTENT "${all_kernels}" @ONLY)
    set(code_objects "")
    set(table "#include \"code_objects.h\"\n#include \"okernel.h\"\n\n")
    set(entries "")
    foreach(gfx IN LISTS targets)
        set(code "${CMAKE_CURRENT_BINARY_DIR}/${gfx}.co")
        add_custom_command(
            OUTPUT "${code}"
            COMMAND "${OKERNEL_CLANG}" -x hip --offload-arch=${gfx} --offload-device-only --no-gpu-bundle-output
                    -mcode-object-version=4 ${gpu_kernel_flags} -ffp-contract=off -fno-exceptions -fno-rtti -Wall
                    -Wextra -Werror "--rocm-device-lib-path=${device_libs}" -idirafter "${OKERNEL_HIP_INCLUDE}"
                    ${gpu_include_flags} "${CMAKE_CURRENT_BINARY_DIR}/kernels.hip" -o "${code}"
            DEPENDS ${gpu_kernels} ${gpu_headers} "${CMAKE_CURRENT_BINARY_DIR}/kernels.hip"
            COMMENT "Compiling kernels for ${gfx}" VERBATIM)
        list(APPEND code_objects "${code}")
        string(APPEND table "extern \"C\" const unsigned char ok_code_${gfx}[];\n"
               "asm(\".section .rodata\\n.balign 4096\\nok_code_${gfx}:\"\n"
               "    \".incbin \\\"${code}\\\"\\n.byte 0\\n.text\\n\");\n")
        string(APPEND entries "    {\"${gfx}\", ok_code_${gfx}},\n")
    endforeach()
    string(APPEND table "\nconst ok::CodeObject ok::code_objects[] = {\n${entries}    {nullptr, nullptr},\n};\n\n"
           "const char *ok_targets() { return \"${target_names}\"; }\n")
    file(CONFIGURE OUTPUT code_objects.cpp CONTENT "${table}" @ONLY)
    set_source_files_properties("${CMAKE_CURRENT_BINARY_DIR}/code_objects.cpp" PROPERTIES
                                OBJECT_DEPENDS "${code_objects}")

    # The launchers: an ordinary compiler reads the same files for the kernels' parameter types.
    set(launchers "")
    foreach(kernel IN LISTS gpu_kernels)
        get_filename_component(name "${kernel}" NAME_WE)
        set(source "${CMAKE_CURRENT_BINARY_DIR}/launchers/${name}.cpp")
        file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"${kernel}\"\n" @ONLY)
        list(APPEND launchers "${source}")
    endforeach()
    gpu_library(okernel_hip hip "${clang_version}" "${gpu_folder}/runtime_hip.cpp" ${launchers}
                "${CMAKE_CURRENT_BINARY_DIR}/code_objects.cpp")
    target_compile_definitions(okernel_hip PRIVATE OK_HOST_HALF)
    target_compile_options(okernel_hip PRIVATE -Wno-unknown-pragmas)  # "unroll", in kernels that it does not compile
endif()

if("cuda" IN_LIST OKERNEL_BACKENDS)
    find_program(OKERNEL_NVCC NAMES nvcc HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin REQUIRED)
    execute_process(COMMAND "${OKERNEL_NVCC}" --version OUTPUT_VARIABLE nvcc_version)
    string(REGEX MATCH "V[0-9.]+" nvcc_version "${nvcc_version}")
    # nvcc says itself where its toolkit lies; it may be a link or a script on the path.
    execute_process(COMMAND "${OKERNEL_NVCC}" --dryrun -x cu /dev/null -c -o /dev/null
                    ERROR_VARIABLE dryrun OUTPUT_QUIET)
    string(REGEX MATCH "TOP=([^\n]*)" top "${dryrun}")
    set(cuda_top "${CMAKE_MATCH_1}")
    find_path(OKERNEL_CUDA_INCLUDE cuda_runtime_api.h REQUIRED
              HINTS "${cuda_top}/include" "${cuda_top}/targets/x86_64-linux/include")
    find_library(OKERNEL_CUDART libcudart_static.a REQUIRED
                 HINTS "${cuda_top}/lib64" "${cuda_top}/lib" "${cuda_top}/targets/x86_64-linux/lib")

    list(GET OKERNEL_CUDA_ARCH 0 oldest)
    list(GET OKERNEL_CUDA_ARCH -1 newest)
    string(REGEX REPLACE "[a-z]" "" oldest "${oldest}")
    set(arch_flags "")
    set(cuda_targets "")
    foreach(arch IN LISTS OKERNEL_CUDA_ARCH)
        list(APPEND arch_flags "-gencode=arch=compute_${arch},code=sm_${arch}")
        string(APPEND cuda_targets "sm_${arch} ")
    endforeach()
    if(newest MATCHES "^[0-9]+$")  # PTX of an architecture's own features (90a) would serve no other
        list(APPEND arch_flags "-gencode=arch=compute_${newest},code=compute_${newest}")
        string(APPEND cuda_targets "compute_${newest}")
    endif()
    string(STRIP "${cuda_targets}" cuda_targets)
    message(STATUS "okernel_cuda: nvcc ${nvcc_version}, targets ${cuda_targets}")

    set(cuda_objects "")
    foreach(kernel IN LISTS gpu_kernels)
        get_filename_component(name "${kernel}" NAME_WE)
        set(object "${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o")
        add_custom_command(
            OUTPUT "${object}"
            COMMAND "${OKERNEL_NVCC}" -x cu ${gpu_kernel_flags} --fmad=false ${arch_flags} -DOK_BUILDING
                    "-DOKERNEL_BACKEND=\"cuda\"" -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti
                    ${gpu_include_flags} -c "${kernel}" -o "${object}"
            DEPENDS ${gpu_kernels} ${gpu_headers}
            COMMENT "Compiling ${name}.hip for ${cuda_targets}" VERBATIM)
        list(APPEND cuda_objects "${object}")
    endforeach()
    file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/cuda")
    set_source_files_properties(${cuda_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
    gpu_library(okernel_cuda cuda "nvcc ${nvcc_version}" "${gpu_folder}/runtime_cuda.cpp" ${cuda_objects})
    target_include_directories(okernel_cuda SYSTEM PRIVATE "${OKERNEL_CUDA_INCLUDE}")
    target_compile_definitions(okernel_cuda PRIVATE OKERNEL_CUDA_OLDEST=${oldest} OKERNEL_TARGETS="${cuda_targets}")
    target_link_libraries(okernel_cuda PRIVATE "${OKERNEL_CUDART}" rt)
    target_link_options(okernel_cuda PRIVATE -Wl,--exclude-libs,ALL)
endif()

if("standin" IN_LIST OKERNEL_BACKENDS)
    find_program(OKERNEL_CLANGXX NAMES clang++-19 clang++ REQUIRED DOC "clang for x86-64, for the stand-in")
    set(standin "${CMAKE_CURRENT_SOURCE_DIR}/../tests/amd/standin")
    file(GLOB_RECURSE standin_headers CONFIGURE_DEPENDS "${standin}/*.h")
    foreach(pair IN LISTS OKERNEL_STANDIN)
        string(REGEX MATCH "^([0-9]+):(.*)$" pair "${pair}")
        set(wave "${CMAKE_MATCH_1}")
        set(gfx "${CMAKE_MATCH_2}")
        set(objects "")
        foreach(source IN LISTS gpu_kernels gpu_common ITEMS "${gpu_folder}/runtime_standin.cpp")
            get_filename_component(name "${source}" NAME)
            set(object "${CMAKE_CURRENT_BINARY_DIR}/standin_${wave}/${name}.o")
            add_custom_command(
                OUTPUT "${object}"
                COMMAND "${OKERNEL_CLANGXX}" -x c++ -std=c++17 -O2 -march=x86-64-v3 -fPIC -fvisibility=hidden
                        -fno-exceptions -fno-rtti -ffp-contract=off -Wall -Wextra -Werror -D__${gfx}__=1
                        -DSTANDIN_WAVE_SIZE=${wave}
                        -DOK_STANDIN=1 -DOK_BUILDING "-DOKERNEL_BACKEND=\"hip\"" "-DOKERNEL_TARGETS=\"${gfx}\""
                        "-DOKERNEL_DEVICE_COMPILER=\"stand-in\"" "-DOKERNEL_VERSION=\"${OKERNEL_VERSION}\""
                        "-DOKERNEL_BUILD_FLAGS=\"wave${wave}\"" "-I${standin}" ${gpu_include_flags} -c "${source}" -o
                        "${object}"
                DEPENDS "${source}" ${gpu_headers} ${standin_headers}
                COMMENT "Compiling ${name} for the stand-in, wave${wave}" VERBATIM)
            list(APPEND objects "${object}")
        endforeach()
        file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/standin_${wave}")
        set(library "${CMAKE_CURRENT_BINARY_DIR}/libokernel_standin_${wave}.so")
        add_custom_command(
            OUTPUT "${library}"
            COMMAND "${OKERNEL_CLANGXX}" -shared -o "${library}" ${objects} -pthread -fuse-ld=lld -Wl,-z,defs
                    -Wl,-z,start-stop-visibility=hidden
            DEPENDS ${objects} COMMENT "Linking libokernel_standin_${wave}.so" VERBATIM)
        list(APPEND standin_libraries "${library}")
    endforeach()
    add_custom_target(okernel_standin ALL DEPENDS ${standin_libraries})
endif()
