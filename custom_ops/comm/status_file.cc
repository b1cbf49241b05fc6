#include "comm/status_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace tfscale {

StatusFile::StatusFile(const char* path) {
  if (path == nullptr || *path == '\0') return;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  // Beyond its end a mapping must not be touched.
  if (lseek(file, 0, SEEK_END) >= static_cast<off_t>(kBytes)) {
    void* map = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) map_ = static_cast<char*>(map);
  }
  close(file);
}

StatusFile::~StatusFile() {
  if (map_ != nullptr) munmap(map_, kBytes);
}

void StatusFile::WriteFailed(const std::string& text) {
  constexpr size_t kOffset = kStateBytes + kPlaceBytes;
  if (map_ != nullptr && map_[kOffset] == '\0') Write(kOffset, kFailedBytes, text);
}

void StatusFile::Write(size_t offset, size_t bytes, const std::string& text) {
  if (map_ == nullptr) return;
  const size_t length = std::min(text.size(), bytes - 1);
  std::memcpy(map_ + offset, text.data(), length);
  std::memset(map_ + offset + length, 0, bytes - length);
}

}  // namespace tfscale
