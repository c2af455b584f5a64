// code_objects.h: AMD machine code inside this library, one ELF file a target; the table is made by the build.
#pragma once

namespace ok {

struct CodeObject {
    const char *target;  // "gfx1030"; null ends the table
    const unsigned char *begin;
};
extern const CodeObject code_objects[];

}  // namespace ok
