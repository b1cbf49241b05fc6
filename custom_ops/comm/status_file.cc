#include "comm/status_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace tfscale {

StatusFile::StatusFile(const char* path) {
  if (path == nullptr || *path == '\0') return;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  struct stat status{};
  // Beyond its end a mapping must not be touched.
  if (fstat(file, &status) == 0 &&
      status.st_size >= static_cast<off_t>(kStateBytes + kPlaceBytes)) {
    void* map =
        mmap(nullptr, kStateBytes + kPlaceBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) {
      map_ = map;
      place_ = static_cast<char*>(map) + kStateBytes;
    }
  }
  close(file);
}

StatusFile::~StatusFile() {
  if (map_ != nullptr) munmap(map_, kStateBytes + kPlaceBytes);
}

void StatusFile::WritePlace(const std::string& text) {
  if (place_ == nullptr) return;
  const size_t length = std::min(text.size(), kPlaceBytes - 1);
  std::memcpy(place_, text.data(), length);
  std::memset(place_ + length, 0, kPlaceBytes - length);
}

}  // namespace tfscale
