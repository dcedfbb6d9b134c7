// Tiles of 3- and 2-bit codes.
#include "tiles.h"

namespace hfa {

TileFns int3_tiles(bool asym, bool wide) { return integer_tiles<3>(asym, wide); }
TileFns int2_tiles(bool asym, bool wide) { return integer_tiles<2>(asym, wide); }

}  // namespace hfa
