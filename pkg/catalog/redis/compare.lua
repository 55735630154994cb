-- Tells what a point is to this catalog's history: part of it, lost to it, of another one, or older than it remembers.
local P, inc, seq, digest = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local call = redis.call
if inc == '' or seq == 0 then return 'part' end
if inc ~= (call('GET', P .. 'incarnation') or '') then
  local upto = call('HGET', P .. 'ancestors', inc)
  if not upto then return 'foreign' end
  return seq <= tonumber(upto) and 'part' or 'lost'
end
if seq > tonumber(call('GET', P .. 'seq') or '0') then return 'lost' end
local id = ARGV[3] .. '-0'
for _, where in ipairs({ 'log', 'marks' }) do
  local found = call('XRANGE', P .. where, id, id)
  if found[1] then
    local f = found[1][2]
    for i = 1, #f, 2 do
      if f[i] == 'h' then return f[i + 1] == digest and 'part' or 'lost' end
    end
  end
end
-- What a suspension has skipped was never here.
local began = call('HGET', P .. 'suspended', 'r')
return began and seq > tonumber(began) and 'lost' or 'forgotten'
