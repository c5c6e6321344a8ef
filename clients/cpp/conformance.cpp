// Plays the corridor through the C++ client, for `stagecoach gateway conformance -- ./conformance`.

#include "stagecoach_client.hpp"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace {

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

void play(stagecoach::Session& session) {
    int position = 0, steps = 0;
    const auto observation = [&] { return std::vector<int>{position, steps}; };
    auto action = session.reset(observation());
    while (action) {
        position = action->number<int>() == 1 ? position + 1 : std::max(position - 1, 0);
        ++steps;
        const bool terminated = position == 5, truncated = !terminated && steps == 20;
        stagecoach::Json::Object info;
        if (terminated || truncated) info = {{"steps", steps}};
        action = session.step(position * 0.5, observation(), terminated, truncated, info);
    }
}

}  // namespace

int main() {
    try {
        stagecoach::Session session({variable("STAGECOACH_URL"), variable("STAGECOACH_TOKEN"),
                                     variable("STAGECOACH_SESSION"), variable("STAGECOACH_JOURNAL")});
        for (int left = std::atoi(variable("STAGECOACH_EPISODES").c_str()); left > 0; --left) play(session);
        if (const std::size_t left = session.settle(60))
            return std::fprintf(stderr, "%zu messages are not acknowledged\n", left), 1;
        session.close();
    } catch (const stagecoach::Refused& error) {
        return std::fprintf(stderr, "%s\n", error.code.c_str()), 2;
    } catch (const std::exception& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 1;
    }
}
