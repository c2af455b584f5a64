#!/bin/sh
# Makes a folder of AMD's device libraries that serves every target given: libraries older than a target lack one file
# for it, oclc_isa_version_<target>.bc, which holds one constant.
# Usage: device_libs.sh <libraries> <clang> <folder to make> <target>...
set -eu
libraries=$1 clang=$2 folder=$3
shift 3
mkdir -p "$folder"
ln -sf "$libraries"/*.bc "$folder"
for target; do
    name=${target#gfx}
    file=$folder/oclc_isa_version_$name.bc
    [ -e "$file" ] && continue
    # major.minor.step of the name, the last two one hexadecimal digit each: 90a is 9.0.10, 1151 is 11.5.1
    step=$(printf %d "0x${name#"${name%?}"}")
    rest=${name%?}
    version=$((${rest%?} * 1000 + $(printf %d "0x${rest#"${rest%?}"}") * 100 + step))
    {
        echo 'target triple = "amdgcn-amd-amdhsa"'
        echo "@__oclc_ISA_version = linkonce_odr protected addrspace(4) constant i32 $version, align 4"
    } | "$clang" -target amdgcn-amd-amdhsa -x ir -emit-llvm -c -nogpulib - -o "$file"
done
